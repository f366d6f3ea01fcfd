"""Planning: peer scores, chains, changes to plans, and the model of broadcast times. Pure: no I/O, clock or randomness,
and no imports from the project's other packages.
"""

from topology.broadcast_time import (
    BroadcastNetwork,
    Prediction,
    chain_time_s,
    chain_times_s,
    ideal_s,
    number_of_chains,
    predict,
    time_to_last_s,
)
from topology.plan import make_plan
from topology.plan_changes import GAMMA, admit, adopt, excise, moves, validate
from topology.plan_tree import MAX_CHILDREN, ROOT, Epoch, LoopError, ParentFullError, Plan, PlanError, PlanMember
from topology.score import Score, Transfers

__all__ = [
    "GAMMA",
    "MAX_CHILDREN",
    "ROOT",
    "BroadcastNetwork",
    "Epoch",
    "LoopError",
    "ParentFullError",
    "Plan",
    "PlanError",
    "PlanMember",
    "Prediction",
    "Score",
    "Transfers",
    "admit",
    "adopt",
    "chain_time_s",
    "chain_times_s",
    "excise",
    "ideal_s",
    "make_plan",
    "moves",
    "number_of_chains",
    "predict",
    "time_to_last_s",
    "validate",
]
