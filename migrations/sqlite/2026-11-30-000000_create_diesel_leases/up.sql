-- One row per name, updated in place. Times are UTC milliseconds by this database's clock; 0 means none.
-- Deleting a row restarts its terms.
CREATE TABLE IF NOT EXISTS diesel_leases (
    name TEXT NOT NULL PRIMARY KEY,
    holder TEXT NOT NULL DEFAULT '',
    instance TEXT NOT NULL DEFAULT '',
    term BIGINT NOT NULL DEFAULT 0,
    expires_at_ms BIGINT NOT NULL DEFAULT 0,
    slot_ms BIGINT NOT NULL DEFAULT 0,
    unfinished_slot_ms BIGINT NOT NULL DEFAULT 0,
    rerun_slot_ms BIGINT NOT NULL DEFAULT 0
) WITHOUT ROWID;
