//! Panics of work that must not end the thread they happen on.
//!
//! Invariant: what a panic said and where is kept for the log, and the program's own panic hook has
//! been called as for any panic.
//!
//! Hazard: the place is known to a panic hook alone. One is put in front of the program's, once, when
//! work is first caught; a hook that the program sets later and that calls no other hides the place.

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook, take_hook};
use std::sync::Once;

/// A panic that was caught.
#[derive(Debug)]
pub(crate) struct Panicked {
    message: String,
    place: Option<String>,
}

impl fmt::Display for Panicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.place {
            Some(place) => write!(f, " at {place}"),
            None => Ok(()),
        }
    }
}

thread_local! {
    static PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn note_places() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let next = take_hook();
        set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            let place = info.location().map(ToString::to_string);
            // While the thread's values are being destroyed there is nobody to tell.
            let _ = PLACE.try_with(|noted| *noted.borrow_mut() = place);
            next(info);
        }));
    });
}

/// Runs `work`, and catches its panic.
pub(crate) fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Panicked> {
    note_places();
    // That of an earlier panic, which somebody else has caught.
    PLACE.take();
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| {
        let message = payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a value that is no text".to_owned());
        Panicked {
            message,
            place: PLACE.take(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_kept_with_its_place() {
        let caught = catch(|| panic!("out of {}", "cheese")).expect_err("it panicked");
        let text = caught.to_string();
        assert!(text.starts_with("out of cheese at src/panic.rs:"), "{text}");
        assert_eq!(catch(|| 7).expect("it did not panic"), 7);
    }
}
