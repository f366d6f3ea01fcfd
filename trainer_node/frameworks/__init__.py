"""p2pcast inside trainers of others. A framework's module imports it when it is used."""
