"""A script of Lightning, as a user has it: a small net on made rows."""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))

    def training_step(self, batch, _):
        loss = ((self.net(batch[0]) - batch[0]) ** 2).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--ckpt_dir", required=True)
parser.add_argument("--max_steps", type=int, default=2000)
parser.add_argument("--save_every", type=int, default=50)
parser.add_argument("--ckpt_path")
args = parser.parse_args()
rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(20000, 256)), batch_size=64)
saves = ModelCheckpoint(
    dirpath=args.ckpt_dir,
    filename="{epoch}-{step}",
    every_n_train_steps=args.save_every,
    save_top_k=-1,
    save_on_exception=True,
)
trainer = lightning.Trainer(
    max_steps=args.max_steps, max_epochs=-1, callbacks=[saves], logger=False, enable_model_summary=False
)
trainer.fit(Net(), rows, ckpt_path=args.ckpt_path)
