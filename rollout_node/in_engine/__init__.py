"""Code that runs inside the ranks of any engine: mapping, staging, proofs, audits. It imports no engine."""
