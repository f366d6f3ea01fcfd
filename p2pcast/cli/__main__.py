"""``python -m p2pcast.cli`` runs the ``p2pcast`` command."""

from p2pcast.cli import main

if __name__ == "__main__":
    main()
