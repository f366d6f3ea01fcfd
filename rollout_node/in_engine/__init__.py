"""Code that runs inside any engine's ranks: mapping, staging, evidence, audits. It imports no engine."""
