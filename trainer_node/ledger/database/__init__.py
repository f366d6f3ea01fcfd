"""The ledger's database and files: tables, one writing connection, shared commits, and the bytes of results."""
