"""A script of transformers' Trainer, as a user has it: a tiny GPT-2 on made tokens."""

from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class Data:
    examples: int = 2000


class MadeRows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = torch.randint(0, 200, (count, 64), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


data, args = HfArgumentParser((Data, TrainingArguments)).parse_args_into_dataclasses()
model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_positions=64, n_embd=128, n_layer=4, n_head=4))
trainer = Trainer(model=model, args=args, train_dataset=MadeRows(data.examples))
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model(f"{args.output_dir}/final")
