"""The demo of a whole RL run: learner, ledger, workers, an engine and peers on one machine."""
