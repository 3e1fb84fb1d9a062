from .configuration_eagle3 import SERVED_ARCHITECTURE, Eagle3DraftConfig
from .modeling_eagle3 import Eagle3DraftModel, Eagle3Output


__all__ = ["SERVED_ARCHITECTURE", "Eagle3DraftConfig", "Eagle3DraftModel", "Eagle3Output"]
