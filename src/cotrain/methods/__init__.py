"""Methods: how a network learns one task after another, one file each.

The tables say what can be chosen by name: an options dataclass each, imported when it is chosen.
"""

METHODS = {
    "finetune": "cotrain.methods.finetune:FinetuneOptions",
    "replay": "cotrain.methods.replay:ReplayOptions",
    "cotraining": "cotrain.methods.cotraining:CotrainingOptions",
    "private": "cotrain.methods.private:PrivateOptions",
    "progressive": "cotrain.methods.progressive:ProgressiveOptions",
    "expert-gate": "cotrain.methods.expert_gate:ExpertGateOptions",
    "joint": "cotrain.methods.finetune:JointOptions",
}
OPTIMIZERS = {
    "sgd": "cotrain.methods.optimizers:Sgd",
    "momentum": "cotrain.methods.optimizers:Momentum",
    "adam": "cotrain.methods.optimizers:Adam",
    "adamw": "cotrain.methods.optimizers:AdamW",
}
