"""Expert load balancing while serving: record loads, plan in the background, move weights in chunks, switch maps."""

from moe_mk.rebalance.ledger import Balance, Ledger, measure_balance
from moe_mk.rebalance.load import LoadHistory, LoadWindow, Phase
from moe_mk.rebalance.manager import RebalanceManager
from moe_mk.rebalance.settings import Hysteresis, RebalanceSettings, Thresholds
from moe_mk.rebalance.status import Incident, RebalanceStatus, RebalanceWarning

__all__ = [
    "Balance", "Hysteresis", "Incident", "Ledger", "LoadHistory", "LoadWindow", "Phase",
    "RebalanceManager", "RebalanceSettings", "RebalanceStatus", "RebalanceWarning", "Thresholds", "measure_balance",
]  # fmt: skip
