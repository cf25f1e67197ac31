//! Without the feature `guarded-connection` no connection is guarded.

pub(crate) fn is_guarded<C>(_: &mut C) -> bool {
    false
}
