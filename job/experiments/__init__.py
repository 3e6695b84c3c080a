"""The ready-made jobs. What gpufleet itself asks of one it asks of its config, which it finds by this table alone."""

CONFIGS = {  # by name: the module and the class of its parameters
    "tinystories-growth": "gpufleet.job.experiments.growth.spec:GrowthConfig",
    "sft-h100": "gpufleet.job.experiments.sft.spec:SftConfig",
    "pretrain-d64": "gpufleet.job.experiments.pretrain.spec:PretrainConfig",
    "kernel-sft": "gpufleet.job.experiments.kernel.spec:KernelConfig",
    "two-tower": "gpufleet.job.experiments.two_tower.spec:TwoTowerConfig",
}
