"""As litgpt: a folder per checkpoint, model_config.yaml last."""

from job import Loop, save


def write(out, step):
    folder = out / f"step-{step:08d}"
    folder.mkdir(exist_ok=True)
    for name in ("lit_model.pth", "tokenizer.json", "model_config.yaml"):
        save(folder / name, step)


if __name__ == "__main__":
    Loop(write, line=lambda step, loss: f"Epoch 1 | iter {step} step {step} | loss train: {loss:.3f}, val: n/a").run()
