"""Goals: what a quantized model is made for, and what is known of the programs that read it.

A new goal is a row in rows.py; what a program was seen to load is a row in facts.py.
"""

from __future__ import annotations

import quark.goals.rows  # noqa: F401 - fills GOALS
from quark.goals.choice import GoalChoice, GoalRequest, choose
from quark.goals.efforts import EFFORTS
from quark.goals.goal import GOALS, RuntimeGoal

__all__ = ["EFFORTS", "GOALS", "GoalChoice", "GoalRequest", "RuntimeGoal", "choose"]
