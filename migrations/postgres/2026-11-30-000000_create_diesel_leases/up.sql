-- One row per name, updated in place. Times are UTC milliseconds by this database's clock; 0 means none.
CREATE TABLE IF NOT EXISTS diesel_leases (
    name VARCHAR(191) COLLATE "C" PRIMARY KEY,
    holder VARCHAR(32) COLLATE "C" NOT NULL DEFAULT '',
    instance VARCHAR(191) COLLATE "C" NOT NULL DEFAULT '',
    term BIGINT NOT NULL DEFAULT 0,
    expires_at_ms BIGINT NOT NULL DEFAULT 0,
    slot_ms BIGINT NOT NULL DEFAULT 0,
    unfinished_slot_ms BIGINT NOT NULL DEFAULT 0,
    rerun_slot_ms BIGINT NOT NULL DEFAULT 0,
    CONSTRAINT diesel_leases_name_holder_key UNIQUE (name, holder)
);

COMMENT ON TABLE diesel_leases IS
    'Leases of the Rust library diesel-lease, one row per name. Deleting a row restarts its terms.';

COMMENT ON CONSTRAINT diesel_leases_name_holder_key ON diesel_leases IS
    'Not redundant, do not drop: it makes holder a key column, so that a claim, which changes it, waits for transactions that have locked the row FOR KEY SHARE before they commit. Without it a stale holder can commit.';
