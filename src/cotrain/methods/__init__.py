"""Methods: how a network learns one task after another, one file each.

The tables say what can be chosen by name: an options dataclass each, imported when it is chosen.
"""

METHODS = {
    "finetune": "cotrain.methods.finetune:FinetuneOptions",
    "replay": "cotrain.methods.replay:ReplayOptions",
    "cotraining": "cotrain.methods.cotraining:CotrainingOptions",
    "ewc": "cotrain.methods.ewc:EWCOptions",
    "online-ewc": "cotrain.methods.ewc:OnlineEWCOptions",
    "si": "cotrain.methods.si:SIOptions",
    "lwf": "cotrain.methods.lwf:LwfOptions",
    "der": "cotrain.methods.der:DerOptions",
    "der-plus-plus": "cotrain.methods.der:DerPlusPlusOptions",
    "ucb": "cotrain.methods.ucb:UCBOptions",
    "a-gem": "cotrain.methods.agem:AgemOptions",
    "gem": "cotrain.methods.gem:GemOptions",
    "ogd": "cotrain.methods.ogd:OGDOptions",
    "mer": "cotrain.methods.mer:MEROptions",
    "progressive": "cotrain.methods.progressive:ProgressiveOptions",
    "expert-gate": "cotrain.methods.expert_gate:ExpertGateOptions",
    "private": "cotrain.methods.private:PrivateOptions",
    "joint": "cotrain.methods.finetune:JointOptions",
}
BUFFERS = {
    "reservoir": "cotrain.memory:ReservoirOptions",
    "ring": "cotrain.memory:RingOptions",
}
OPTIMIZERS = {
    "sgd": "cotrain.methods.optimizers:Sgd",
    "momentum": "cotrain.methods.optimizers:Momentum",
    "adam": "cotrain.methods.optimizers:Adam",
    "adamw": "cotrain.methods.optimizers:AdamW",
}
