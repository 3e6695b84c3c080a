"""Conversations of a JSONL file: both forms of a line, and mistakes with their lines."""

from __future__ import annotations

import bz2
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.experiments.dataset.chat import JsonlChats, Turn
from tests.job.sft_world import jsonl

ROWS = json.dumps({"instruction": "a", "response": "b"}).encode() * 9


def test_mistakes_in_a_file_are_named_with_their_lines(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        {"instruction": "a", "response": "b"},
        "{not json",
        {"instruction": "a"},
        {"instruction": "a", "response": ""},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"messages": [{"role": "assistant", "content": "a"}]},
        "[1]",
        "",
        {"instruction": "a", "response": 3},
        "[" * 100_000,
        r'{"instruction": "pair \ud83d\ude00, half \ud83d", "response": "b"}',
        r'{"messages": [{"role": "user", "content": "\ude00"}, {"role": "assistant", "content": "b"}]}',
        r'{"instruction": "\ud83d\ude00", "response": "b", "left out": "\ud83d"}',
        {"messages": [{"role": role, "content": "a"} for role in ("user", "system", "assistant")]},
        {"messages": [{"role": role, "content": "a"} for role in ("system", "assistant", "assistant")]},
        {"messages": [{"role": role, "content": "a", "weight": 0.5} for role in ("user", "assistant")]},
    )
    with pytest.raises(ValueError, match=":2: not JSON") as error:
        list(JsonlChats(path).conversations())
    lines = str(error.value).splitlines()
    assert [int(line.split(":")[1]) for line in lines] == [*range(2, 9), *range(10, 14), 15, 17]
    assert lines[1].endswith("response: missing; it has instruction")
    assert "the last message must have the role assistant" in lines[3]
    assert "'robot' is not one of system, user, assistant" in lines[4]
    assert r"instruction: \ud83d at character 13 is half of a surrogate pair" in lines[9]
    assert "messages[1].role: system only as the first message" in lines[11]
    assert lines[5].endswith("messages: an answer has no question before it (and in 1 more line, the next is 16)")
    assert lines[12].endswith("messages[1].weight: 0.5; allowed: 1 (learned) or 0 (not learned)")
    assert r"messages[0].content: \ude00 at character 0 is half" in lines[10]


@pytest.mark.parametrize(("encoding", "named"), [("latin-1", "LATIN1"), ("utf-16", "UTF-16")])
def test_another_encoding_is_said_once_with_what_to_do(tmp_path: Path, encoding: str, named: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(('{"instruction": "Grüße", "response": "b"}\n' * 3).encode(encoding))
    with pytest.raises(ValueError, match=r"chats\.jsonl:1: not UTF-8 \(byte \d+\); convert the file first") as error:
        list(JsonlChats(path).conversations())
    assert len(str(error.value).splitlines()) == 1
    assert f"iconv -f {named} -t UTF-8 OLD > NEW" in str(error.value)


def test_parquet_is_said_once_where_its_first_line_happens_to_be_text(tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    path.write_bytes(b"PAR1\x15\x04\n\x15\n\x00")
    with pytest.raises(ValueError, match=r"chats\.parquet:1: not JSON; it is Parquet; write it as text first") as error:
        list(JsonlChats(path).conversations())
    assert len(str(error.value).splitlines()) == 1


def test_a_table_is_said_once_with_what_makes_lines_of_it(tmp_path: Path) -> None:
    path = tmp_path / "my data.csv"
    path.write_text("instruction,response\na,b\n" * 30, encoding="utf-8-sig")
    with pytest.raises(ValueError, match="this is a table; write one JSON object per line") as error:
        list(JsonlChats(path).conversations())
    assert str(error.value).endswith(
        "pandas.read_csv('my data.csv').to_json('my data.jsonl', orient='records', lines=True)"
    )


def test_a_byte_order_mark_on_a_line_of_its_own_is_a_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text('\n{"instruction": "a", "response": "b"}\n', encoding="utf-8-sig")
    assert list(JsonlChats(path).conversations()) == [(Turn("user", "a"), Turn("assistant", "b"))]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_said_once_with_what_makes_lines_of_it(tmp_path: Path, indent: int | None) -> None:
    for name, command in (
        ("arr.json", "`jq -c '.[]' arr.json > arr.jsonl`"),
        ("arr.jsonl", "`jq -c '.[]' arr.jsonl > arr-lines.jsonl`"),
    ):
        text = json.dumps([{"instruction": "a", "response": "b"}] * 30, indent=indent)
        (tmp_path / name).write_text(text, encoding="utf-8-sig")  # as Windows writes it
        with pytest.raises(ValueError, match="this is a JSON array; write one object per line: ") as error:
            list(JsonlChats(tmp_path / name).conversations())
        assert str(error.value).endswith(command)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "conversations is called messages here: a list of role"),
        ({"instruction": "a", "output": "b"}, "output is called response here: rename it; or give messages"),
        ({"prompt": "a", "completion": "b"}, "prompt and completion are called instruction and response here: rename"),
        ({"prompt": "a", "response": "b"}, "prompt is called instruction here: rename it; or give"),
        ({"question": "a", "answer": "b"}, "question and answer are called instruction and response here: rename them"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content: a list of parts"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]: tool calls are not read: leave"),
        ({"messages": [{"role": "tool", "content": "9"}]}, "messages[0]: tool calls are not read: leave"),
        ({"instruction": "a", "input": "c", "output": "b"}, "and write what is in input at the end of instruction"),
    ],
)
def test_keys_of_other_forms_are_said_once_with_their_names_here(
    tmp_path: Path, line: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=":1: ") as error:
        list(JsonlChats(jsonl(tmp_path, *[line] * 30)).conversations())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_mistakes_is_not_listed_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lines after 20 were not checked"):
        list(
            JsonlChats(
                jsonl(tmp_path, *({"instruction": "a", f"key {number}": 1} for number in range(100)))
            ).conversations()
        )


def test_one_mistake_on_every_line_is_told_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="instruction: missing; it has text") as error:
        list(JsonlChats(jsonl(tmp_path, *[{"text": "a"}] * 30)).conversations())
    assert str(error.value).endswith(":1: instruction: missing; it has text (and in 29 more lines, the next is 2)")


def test_objects_over_several_lines_are_said_once_with_what_makes_lines_of_them(tmp_path: Path) -> None:
    path = tmp_path / "pretty.jsonl"
    path.write_text(2 * (json.dumps({"instruction": "a", "response": "b"}, indent=1) + "\n"))
    with pytest.raises(ValueError, match="spans several lines") as error:
        list(JsonlChats(path).conversations())
    assert str(error.value).endswith("write one object per line: `jq -c . pretty.jsonl > pretty-lines.jsonl`")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.bz2", bz2.compress(ROWS), "it is compressed; unpack it first: bunzip2"),
        ("a.jsonl.xz", lzma.compress(ROWS), "it is compressed; unpack it first: unxz"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\0\0\0", "it is an Arrow stream"),
        ("._a.jsonl", b"\0\x05\x16\x07\0\x02\xff", "name the file without ._"),
        ("a.bin", b"\x01\x02\xff\xfe\x03", "it contains bytes that no text has (0x01)"),
    ],
)
def test_files_that_are_no_text_are_not_told_to_be_latin(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=":1: not UTF-8") as error:
        list(JsonlChats(tmp_path / name).conversations())
    assert words in str(error.value)
    assert "iconv" not in str(error.value)


def test_instructions_and_messages_of_one_conversation_are_the_same(tmp_path: Path) -> None:
    messages = [("system", "s"), ("user", "a"), ("assistant", "b")]
    path = jsonl(
        tmp_path,
        {"system": "s", "instruction": "a", "response": "b", "id": 7},
        {"messages": [{"role": role, "content": text} for role, text in messages]},
    )
    one, two = JsonlChats(path).conversations()
    assert list(one) == list(two) == [Turn(*m) for m in messages]


def test_a_system_turn_that_says_nothing_is_none_in_both_forms(tmp_path: Path) -> None:
    messages = [{"role": role, "content": text} for role, text in (("system", ""), ("user", "a"), ("assistant", "b"))]
    path = jsonl(tmp_path, {"system": "", "instruction": "a", "response": "b"}, {"messages": messages})
    one, two = JsonlChats(path).conversations()
    assert list(one) == list(two) == [Turn("user", "a"), Turn("assistant", "b")]
