-- One row per name, updated in place. Times are UTC milliseconds by this database's clock; 0 means none.
-- DDL commits by itself here: a crash before the migration is noted runs this file again, hence IF NOT EXISTS.
CREATE TABLE IF NOT EXISTS diesel_leases (
    name VARBINARY(191) NOT NULL PRIMARY KEY, -- bytes: collations fold case, accents and trailing blanks
    holder VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '',
    instance VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT '',
    term BIGINT NOT NULL DEFAULT 0,
    expires_at_ms BIGINT NOT NULL DEFAULT 0,
    slot_ms BIGINT NOT NULL DEFAULT 0,
    unfinished_slot_ms BIGINT NOT NULL DEFAULT 0,
    rerun_slot_ms BIGINT NOT NULL DEFAULT 0
) ENGINE = InnoDB COMMENT = 'Leases of the Rust library diesel-lease. Deleting a row restarts its terms.';
