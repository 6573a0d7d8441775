import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loglinear_jax.text import CorpusError, sources
from loglinear_jax.text.sources import cut_line, read_lines, share_bounds, split_files

# Characters of every length in UTF-8, and all that some other splitting into lines would stop at.
TEXT = st.text(alphabet=list("ab é東😀 \n\n\r\t\x0b\x0c\x85\u2028"), max_size=200)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 16)
    monkeypatch.setattr(sources, "PIECE_CHARS", 8)


@pytest.mark.usefixtures("small_blocks")
class TestSmallBlocks:
    @given(TEXT, st.data())
    def test_lines_are_those_of_the_part_asked_for_that_are_not_blank(self, text, data):
        before, after = (data.draw(TEXT) for _ in range(2))
        file = io.BytesIO((before + text + after).encode())
        start = len(before.encode())
        file.seek(start)
        lines = [line + "\n" for line in text.split("\n")]
        lines[-1] = lines[-1][:-1]
        found = list(read_lines(file, "x", start + len(text.encode())))
        assert found == [line for line in lines if line.strip()]

    @given(TEXT)
    def test_pieces_join_to_the_line(self, text):
        pieces = cut_line(text)
        assert "".join(pieces) == text and all(len(piece) <= 8 for piece in pieces)

    def test_long_lines_are_cut_between_words(self):
        assert cut_line("aaa bbb ccc ddd") == ["aaa bbb", " ccc ddd"]
        assert cut_line("a" * 20) == ["a" * 8, "a" * 8, "a" * 4]

    @given(TEXT)
    def test_shares_begin_lines_and_none_is_empty(self, tmp_path_factory, text):
        path = tmp_path_factory.getbasetemp() / "shares.txt"
        data = text.encode()
        path.write_bytes(data)
        try:
            bounds = share_bounds(path)
        except CorpusError as error:
            assert "nothing is left for" in str(error)
            return
        assert [0, len(data)] == [bounds[0], bounds[-1]]
        assert len(set(bounds)) == 4 and bounds == sorted(bounds)
        for at in bounds[1:3]:
            data[at:].decode()
            assert data[at - 1 : at] == b"\n" or data[at : at + 1] == b" "


def test_shares_of_a_long_file(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("0123456\n" * 1000, encoding="utf-8")
    assert share_bounds(path) == [0, 7208, 7608, 8000]


@pytest.mark.usefixtures("small_blocks")
def test_text_that_is_one_line_is_shared_by_words(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("abcd " * 1000, encoding="utf-8")
    assert share_bounds(path) == [0, 4504, 4754, 5000]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"good\nb\xffd\n", "x.txt is not UTF-8 text: byte 0xff at position 6"),
        (b"a\n" * 2**20 + b"\x80", f"byte 0x80 at position {2**21}$"),
    ],
)
def test_undecodable(data, message):
    with pytest.raises(CorpusError, match=message):
        list(read_lines(io.BytesIO(data), "x.txt", len(data)))


def test_byte_order_mark_is_no_text():
    assert list(read_lines(io.BytesIO("\ufeffa\n".encode()), "x", 5)) == ["a\n"]


@pytest.mark.parametrize("names", ["{}.txt", "wiki.{}.tokens", "my-{}.txt"])
def test_split_files(tmp_path, names):
    names = [names.format(part) for part in ("train", "valid", "test")]
    for name in (*names, "README.md"):
        (tmp_path / name).write_text("x", encoding="utf-8")
    assert [path.name for path in split_files(tmp_path).values()] == names


def test_split_files_missing_or_twice(tmp_path):
    (tmp_path / "train.txt").write_text("x", encoding="utf-8")
    with pytest.raises(CorpusError, match="expected one text file for validation, such as valid.txt; got none"):
        split_files(tmp_path)
    (tmp_path / "train.raw").write_text("x", encoding="utf-8")
    with pytest.raises(CorpusError, match="for train, such as train.txt; got train.raw, train.txt"):
        split_files(tmp_path)
