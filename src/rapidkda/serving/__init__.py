"""The serving layer: state pools, the step's segment tables, the planned workspace, and the KDA layer over them.

    pool = StatePool(layer.state_shape(max_drafts=3), num_slots=256, layers=34, device="cuda")
    workspace = Workspace(pool.shape, limits, layer.choices["prefill"], device="cuda")
    batch = StepBatch(pool, limits)
    slots = pool.allocate("request-1")
    batch.fill([StepRequest("request-1", "prefill", 512, slots, has_initial_state=False)])
    out = layer(hidden, batch, pool, workspace)     # once a layer

Host-side order of a step: allocate slots, `StepBatch.fill`, every layer's forward, sample, and tell the accepted counts
with the requests of the next step.
"""

from ..problem import Rollback
from .backends import BackendWish
from .batch import StepBatch
from .config import StateShape, StepLimits
from .core import CoreInputs, GatedNorm, run_core
from .layer import Glm5NextLinearAttention, KDALayer
from .plan import StepRequest
from .pool import LayerState, StatePool, plan_bytes
from .prefix import checkpoint_offsets, usable_prefix, warn_if_unreachable
from .slots import SlotsExhausted, SlotTable
from .tables import RowTable, VerifyTable
from .transfer import ExportedState, export_state, import_state, merge_states, split_state
from .workspace import Workspace

__all__ = [
    "BackendWish",
    "CoreInputs",
    "ExportedState",
    "GatedNorm",
    "Glm5NextLinearAttention",
    "KDALayer",
    "LayerState",
    "Rollback",
    "RowTable",
    "SlotTable",
    "SlotsExhausted",
    "StatePool",
    "StateShape",
    "StepBatch",
    "StepLimits",
    "StepRequest",
    "VerifyTable",
    "Workspace",
    "checkpoint_offsets",
    "export_state",
    "import_state",
    "merge_states",
    "plan_bytes",
    "run_core",
    "split_state",
    "usable_prefix",
    "warn_if_unreachable",
]
