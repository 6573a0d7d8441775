import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loglinear_jax.text import CorpusError, sources
from loglinear_jax.text.sources import cut_line, read_lines, share_bounds, split_files

# Characters of every length in UTF-8, and all that some other splitting into lines would stop at.
TEXT = st.text(alphabet=list("ab é東😀 \n\n\r\t\x0b\x0c\x85\u2028"), max_size=200)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK_BYTES", 16)
        patch.setattr(sources, "PIECE_CHARS", 8)
        yield


@given(TEXT, st.data())
def test_lines_are_those_of_the_part_asked_for_that_are_not_blank(text, data):
    before, after = (data.draw(TEXT) for _ in range(2))
    file = io.BytesIO((before + text + after).encode())
    start = len(before.encode())
    file.seek(start)
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    found = list(read_lines(file, "x", start + len(text.encode())))
    assert found == [line for line in lines if line.strip()]


@given(TEXT)
def test_pieces_join_to_the_line(text):
    pieces = cut_line(text)
    assert "".join(pieces) == text and all(len(piece) <= 8 for piece in pieces)


def test_long_lines_are_cut_between_words():
    assert cut_line("aaa bbb ccc ddd") == ["aaa bbb", " ccc ddd"]
    assert cut_line("a" * 20) == ["a" * 8, "a" * 8, "a" * 4]


@given(TEXT)
def test_shares_begin_lines_and_none_is_empty(tmp_path_factory, text):
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


@pytest.mark.parametrize(("part", "bounds"), [("0123456\n", [0, 7208, 7608, 8000]), ("abcd ", [0, 4504, 4754, 5000])])
def test_shares_of_a_long_file_or_line(tmp_path, part, bounds):
    (tmp_path / "x.txt").write_text(part * 1000, encoding="utf-8")
    assert share_bounds(tmp_path / "x.txt") == bounds


def test_the_position_of_what_is_not_utf_8():
    data = b"a\n" * 2**10 + b"\x80"
    with pytest.raises(CorpusError, match=f"x.txt is not UTF-8 text: byte 0x80 at position {2**11}$"):
        list(read_lines(io.BytesIO(data), "x.txt", len(data)))


def test_files_of_splits(tmp_path):
    def write(*names):
        for name in names:
            (tmp_path / name).write_text("x", encoding="utf-8")

    write("my-train.txt", "README.md")
    with pytest.raises(CorpusError, match="expected one text file for validation, such as valid.txt; got none"):
        split_files(tmp_path)
    write("my-valid.txt", "my-test.txt")
    assert [path.name for path in split_files(tmp_path).values()] == ["my-train.txt", "my-valid.txt", "my-test.txt"]
    write("train.raw")
    with pytest.raises(CorpusError, match="for train, such as train.txt; got my-train.txt, train.raw"):
        split_files(tmp_path)
