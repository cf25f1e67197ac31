//! What the public types can do, whatever engine there is.

use std::error::Error as StdError;
use std::fmt::Debug;

use diesel_lease::locks::{
    self, AcquireOptions, InvalidKey, LockError, LockScope, NamedLock, NamedLocks,
};
use diesel_lease::{
    Act, Builder, Campaign, CommitUnknown, Ending, Entered, Error, HeldLease, InvalidName,
    InvalidSchedule, InvalidSlot, InvalidTimings, Leader, LeaderEvent, Lease, LeaseRecord, Leases,
    LossCause, Lost, Mistake, RunError, StepDownReason, StopToken, Tenure, Timings, Unfinished,
    Unsupported,
};

#[test]
fn handles_are_shared_between_threads() {
    fn shared<T: Debug + Send + Sync + 'static>() {}
    shared::<Leases>();
    shared::<Builder>();
    shared::<Timings>();
    shared::<StopToken>();
    shared::<Lease>();
    shared::<HeldLease>();
    shared::<Tenure>();
    shared::<LeaseRecord>();
    shared::<Unfinished>();
    shared::<Leader>();
    shared::<LeaderEvent>();
    shared::<NamedLocks>();
    shared::<NamedLock>();
}

#[test]
fn errors_can_be_sent_anywhere() {
    fn an_error<T: StdError + Send + Sync + 'static>() {}
    an_error::<Error>();
    an_error::<RunError<()>>();
    an_error::<Lost>();
    an_error::<Ending>();
    an_error::<CommitUnknown>();
    an_error::<InvalidName>();
    an_error::<InvalidTimings>();
    an_error::<InvalidSlot>();
    an_error::<InvalidSchedule>();
    an_error::<Unsupported>();
    an_error::<LockError>();
    an_error::<InvalidKey>();
    #[cfg(feature = "guarded-connection")]
    an_error::<diesel_lease::TenureRequired>();
}

#[test]
fn every_public_type_is_shown_by_debug() {
    fn shown<T: Debug>() {}
    shown::<Act>();
    shown::<Campaign>();
    shown::<Entered>();
    shown::<Mistake>();
    shown::<StepDownReason>();
    shown::<locks::Builder>();
    shown::<AcquireOptions>();
    shown::<LockScope>();
    #[cfg(feature = "guarded-connection")]
    shown::<diesel_lease::LeaseGuard>();
    #[cfg(feature = "scheduler")]
    shown::<diesel_lease::scheduler::Scheduler>();
    #[cfg(feature = "scheduler")]
    shown::<diesel_lease::scheduler::RunningScheduler>();
    #[cfg(feature = "scheduler")]
    shown::<diesel_lease::scheduler::Round<'_>>();
}

#[test]
fn values_are_cloned_and_compared() {
    fn cloned<T: Clone>() {}
    fn compared<T: PartialEq>() {}
    cloned::<Leases>();
    cloned::<Tenure>();
    cloned::<StopToken>();
    cloned::<Timings>();
    cloned::<Unfinished>();
    cloned::<LeaseRecord>();
    cloned::<Lost>();
    cloned::<LossCause>();
    cloned::<Ending>();
    cloned::<LeaderEvent>();
    cloned::<NamedLocks>();
    compared::<LossCause>();
    compared::<Ending>();
}
