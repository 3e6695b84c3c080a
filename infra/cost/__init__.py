"""What a run costs: work -> hours (runtime), interruptions (risk), lines and totals (bill), text (table). Pure."""
