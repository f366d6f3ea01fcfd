from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # real_sglang
sys.path.append(str(Path(__file__).parents[1] / "vllm"))  # real_server
sys.path.append(str(Path(__file__).parents[2] / "daemons" / "rollouts"))  # ledger_stage, parity_task
