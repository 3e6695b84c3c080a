"""The ready-made jobs. Only this table names their configs. A config answers all questions of gpufleet about
its job.
"""

CONFIGS = {  # the module and the class of a job's parameters, by the job's name
    "tinystories-growth": "gpufleet.job.experiments.growth.spec:GrowthConfig",
    "sft-h100": "gpufleet.job.experiments.sft.spec:SftConfig",
    "pretrain-d64": "gpufleet.job.experiments.pretrain.spec:PretrainConfig",
    "kernel-sft": "gpufleet.job.experiments.kernel.spec:KernelConfig",
    "two-tower": "gpufleet.job.experiments.two_tower.spec:TwoTowerConfig",
}
