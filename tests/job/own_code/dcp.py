"""As torch.distributed.checkpoint: a folder of shards that nothing but .metadata tells whole."""

from job import Loop, save


def write(out, step):
    folder = out / f"step-{step}"
    folder.mkdir(exist_ok=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        save(folder / name, step)


if __name__ == "__main__":
    Loop(write).run()
