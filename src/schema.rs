// @generated automatically by Diesel CLI.

diesel::table! {
    diesel_leases (name) {
        name -> Text,
        holder -> Text,
        instance -> Text,
        term -> BigInt,
        expires_at_ms -> BigInt,
        slot_ms -> BigInt,
        unfinished_slot_ms -> BigInt,
        rerun_slot_ms -> BigInt,
    }
}
