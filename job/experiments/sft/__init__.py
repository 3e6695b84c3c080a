"""sft-h100: LoRA fine-tuning of a published decoder, then its merge."""
