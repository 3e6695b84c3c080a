"""As Lightning: one file per checkpoint, its epoch in the name."""

from job import Loop, save


def write(out, step):
    save(out / f"epoch={step // 10}-step={step}.ckpt", step)


if __name__ == "__main__":
    Loop(write, line=lambda step, loss: f"Epoch 0: 10%|# | {step}/100000 [00:01<00:09, train_loss={loss:.3f}]").run()
