"""Parts of ``p2pcast.adapters.verl``: the checkpoint engine, the manager, their settings and waits."""
