"""The ready-made jobs. gpufleet asks a job's config for everything it needs of the job, and finds the config by this
table alone.
"""

CONFIGS = {  # by name: the module and the class of its parameters
    "tinystories-growth": "gpufleet.job.experiments.growth.spec:GrowthConfig",
    "sft-h100": "gpufleet.job.experiments.sft.spec:SftConfig",
    "pretrain-d64": "gpufleet.job.experiments.pretrain.spec:PretrainConfig",
    "kernel-sft": "gpufleet.job.experiments.kernel.spec:KernelConfig",
    "two-tower": "gpufleet.job.experiments.two_tower.spec:TwoTowerConfig",
}
