"""Small stories from a seed: what a rehearsal trains on, so that it needs no network and its loss still falls.

About 27 words each, from fewer than 200 different ones, with the structure a small model can learn: who, where, what
went wrong, how it ended.
"""

from __future__ import annotations

import random

_NAMES = (
    "Lily", "Tom", "Anna", "Ben", "Mia", "Sam", "Sue", "Max", "Ella", "Jack", "Rosie", "Leo", "Amy", "Tim",
    "Kate", "Fred",
)  # fmt: skip
_BEINGS = ("girl", "boy", "dog", "cat", "bird", "rabbit", "bear", "fox", "duck", "mouse", "frog", "pony")
_TRAITS = ("little", "brave", "kind", "happy", "shy", "clever", "funny", "tired", "sleepy", "curious")
_PLACES = ("park", "garden", "forest", "house", "school", "river", "beach", "hill", "barn", "kitchen")
_THINGS = (
    "ball", "kite", "book", "cake", "flower", "stone", "hat", "boat", "apple", "drum", "shell", "lamp", "key",
    "box", "toy",
)  # fmt: skip
_COLOURS = ("red", "blue", "green", "yellow", "white", "golden")
_OPENINGS = (
    "Once upon a time there was a {trait} {being} named {name}.",
    "Once upon a time, {name} the {being} lived near the {place}.",
    "One day, a {being} named {name} went to the {place}.",
    "The {trait} {being} was called {name}.",
    "One day, {name} found a {colour} {thing} in the {place}.",
)
_TURNS = (
    "{name} wanted to play with the {colour} {thing}, but it was lost.",
    "{name} saw {friend} and they looked for the {thing} together.",
    "The {thing} was in the {place} and {name} could not reach it.",
    "{friend} was sad because the {colour} {thing} was broken.",
    '{friend} said, "Do not cry, {name}. I will help you."',
    "They ran to the {place} and saw a {trait} {being}.",
    "{name} was scared, but {friend} was not.",
)
_ENDINGS = (
    "They were happy and went home.",
    "{name} smiled and gave the {thing} to {friend}.",
    "From that day they were best friends.",
    "{name} learned to share.",
    "Then it was time to sleep.",
)


def stories(count: int, seed: int) -> list[str]:
    """`count` stories that depend on the seed alone, the same on every machine."""
    draw = random.Random(f"stories {seed}")
    return [_story(draw) for _ in range(count)]


def _story(draw: random.Random) -> str:
    name, friend = draw.sample(_NAMES, 2)
    words = {
        "name": name,
        "friend": friend,
        "being": draw.choice(_BEINGS),
        "trait": draw.choice(_TRAITS),
        "place": draw.choice(_PLACES),
        "thing": draw.choice(_THINGS),
        "colour": draw.choice(_COLOURS),
    }
    turn = draw.choice(_TURNS)
    parts = (draw.choice(_OPENINGS), turn, draw.choice(_ENDINGS))
    return " ".join(part.format(**words) for part in parts)
