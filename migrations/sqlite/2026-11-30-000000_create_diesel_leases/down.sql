DROP TABLE IF EXISTS diesel_leases;
