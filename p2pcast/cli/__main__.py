"""``python -m p2pcast.cli`` is ``p2pcast``."""

from p2pcast.cli import main

if __name__ == "__main__":
    main()
