"""As nanoGPT: one file that is overwritten in place. Which step it is of stands in it."""

from job import Loop, save


def write(out, step):
    save(out / "ckpt.pt", step)


if __name__ == "__main__":
    Loop(write).run()
