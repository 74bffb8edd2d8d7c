import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from subquad.data import audio, speech
from subquad.data.files import Broken, Missing


def cepstra(frames: np.ndarray, order: str = ">") -> bytes:
    return struct.pack(f"{order}i", frames.size) + frames.astype(f"{order}f4").tobytes()


def put_an4(root: Path) -> dict[str, np.ndarray]:
    """Twenty people of two utterances for training, and one person of three for testing."""
    draw, made = np.random.default_rng(0), {}
    (root / "etc").mkdir(parents=True)
    (root / "etc/an4.phone").write_text("AH\nB\nEY\nIY\nSIL\nT\nUW\n")
    (root / "etc/an4.dic").write_text("A                    AH\nA(2)                 EY\nB  B IY\nTWO  T UW\n\n")
    people = {"train": [f"f{chr(97 + n)}" for n in range(20)], "test": ["mx"]}
    for part, speakers in people.items():
        ids, said = [], []
        for person in speakers:
            for n, words in enumerate(["A B", "TWO", "B B A"][: 3 if part == "test" else 2]):
                name = f"an{n}-{person}-b"
                ids.append(f"an4{part}_clstk/{person}/{name}")
                said.append(f"{words} ({name})")
                made[ids[-1]] = draw.normal(3, 2, (7 + 3 * n, 13)).astype(np.float32)
                path = root / "feat" / f"{ids[-1]}.mfc"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(cepstra(made[ids[-1]], "><"[n % 2]))
        (root / f"etc/an4_{part}.fileids").write_text("\n".join(ids) + "\n")
        (root / f"etc/an4_{part}.transcription").write_text("\n".join(said) + "\n")
    return made


def test_an4_is_read_with_its_phones_and_people_kept_apart(data: Path) -> None:
    made = put_an4(data / "an4")
    found = speech.an4()
    assert found.name == "AN4"
    assert found.symbols == ("", "AH", "B", "EY", "IY", "T", "UW")
    assert [len(part) for part in found[1:4]] == [36, 4, 3]
    people = [{name.split("/")[1] for name in part.names} for part in found[1:4]]
    assert people[1] == {"fj", "ft"}
    assert not people[0] & people[1]
    batch = found.test.batch(np.array([2, 1]))
    assert [found.symbols[s] for s in batch["targets"][0]] == ["B", "IY", "B", "IY", "EY"]  # A is a letter
    assert batch["targets"][1].tolist() == [5, 6, 0, 0, 0]
    assert batch["target_lengths"].tolist() == [5, 2]
    assert batch["lengths"].tolist() == [13, 10]
    assert batch["frames"].shape == (2, 14, 13)  # padded to an even step up to the longest
    assert not batch["frames"][0, 13:].any()
    assert not batch["frames"][1, 10:].any()
    raw = made[found.test.names[1]]
    np.testing.assert_allclose(batch["frames"][1, :10], (raw - found.train.mean) / found.train.deviation, rtol=1e-5)


def test_training_frames_have_mean_0_and_deviation_1(data: Path) -> None:
    put_an4(data / "an4")
    train = speech.an4().train
    batch = train.batch(np.arange(len(train)))
    rows = torch.cat([row[:n] for row, n in zip(batch["frames"], batch["lengths"], strict=True)])
    torch.testing.assert_close(rows.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(0, correction=0), torch.ones(13), atol=1e-4, rtol=0)


def test_what_is_wrong_with_an4_is_named(data: Path) -> None:
    put_an4(data / "an4")
    path = data / "an4/feat/an4test_clstk/mx/an0-mx-b.mfc"
    body = path.read_bytes()
    for broken in (body[:-4], body[:3], body + b"\0" * 52, b"\0" * 4, struct.pack(">i", 12) + body[4:52]):
        path.write_bytes(broken)
        with pytest.raises(Broken, match=r"an0-mx-b\.mfc is not a whole file of 13 mel cepstra"):
            speech.an4()
    path.unlink()
    with pytest.raises(Broken, match=r"an0-mx-b\.mfc cannot be read"):
        speech.an4()
    spoken = data / "an4/etc/an4_test.transcription"
    spoken.write_text("A (an0-mx-b)\nFOUR (an1-mx-b)\nB (an2-mx-b)\n")
    with pytest.raises(Broken, match=r"an4_test\.transcription holds the word 'FOUR', which is not in the dictionary"):
        speech.an4()
    spoken.write_text("A (an0-mx-b)\n")
    with pytest.raises(Broken, match=r"an4_test\.transcription has no line for an1-mx-b"):
        speech.an4()
    spoken.write_text("A B\n")
    with pytest.raises(Broken, match=r"an4_test\.transcription holds a line that does not end in \(name\): A B"):
        speech.an4()


def test_a_is_the_letter_in_an4_not_the_article(data: Path) -> None:
    with pytest.raises(Missing, match="an4 is not in"):
        speech.an4_dictionary()
    put_an4(data / "an4")
    assert speech.an4_dictionary() == {"A": ("EY",), "A(2)": ("EY",), "B": ("B", "IY"), "TWO": ("T", "UW")}
    assert speech.DIGITS["seven"] == "S EH V AH N"


def noise(path: Path, seed: int, seconds: float = 0.2, rate: int = 8000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    audio.write_wav(path, np.random.default_rng(seed).uniform(-0.5, 0.5, int(rate * seconds)), rate)


def test_spoken_digits_are_split_by_index(data: Path) -> None:
    for digit in (0, 7):
        for index in (0, 4, 5, 9, 10, 49):
            noise(data / f"fsdd/recordings/{digit}_jackson_{index}.wav", index)
    for _ in range(2):  # made, then read from the cache
        found = speech.digits()
        assert found.train.names == ("0_jackson_10", "0_jackson_49", "7_jackson_10", "7_jackson_49")
        assert found.validation.names == ("0_jackson_5", "0_jackson_9", "7_jackson_5", "7_jackson_9")
        assert found.test.names == ("0_jackson_0", "0_jackson_4", "7_jackson_0", "7_jackson_4")
        batch = found.test.batch(np.array([2]))
        assert batch["frames"].shape == (1, 21, 40)
        assert [found.symbols[s] for s in batch["targets"][0]] == ["S", "EH", "V", "AH", "N"]
    (data / "fsdd/recordings/seven.wav").write_bytes(b"")
    with pytest.raises(Broken, match=r"seven\.wav is not a spoken digit"):
        speech.digits()


def test_a_folder_of_parts_with_a_dictionary_has_phones(data: Path) -> None:
    root = data / "wsj"
    for part, names in (("train", "abc"), ("dev", "d"), ("test", "e")):
        for n, name in enumerate(names):
            noise(root / part / f"speaker/{name}.wav", n)
        (root / part / "text").write_text("".join(f"{name} hello World\n" for name in names))
    (root / "lexicon.txt").write_text(";;; a comment\nHELLO HH AH L OW\nworld W ER L D\n")
    found = speech.folder(root)
    assert found.name == "wsj"
    assert [part.names for part in found[1:4]] == [("a", "b", "c"), ("d",), ("e",)]
    batch = found.train.batch(np.array([0]))
    assert [found.symbols[s] for s in batch["targets"][0]] == ["HH", "AH", "L", "OW", "W", "ER", "L", "D"]
    (root / "dev/text").unlink()
    with pytest.raises(Broken, match=r"d\.wav has no transcript: neither d\.txt nor a line for d"):
        speech.folder(root)
    (root / "dev/text").write_text("d goodbye\n")
    with pytest.raises(Broken, match="holds the word 'goodbye', which is not in the dictionary"):
        speech.folder("wsj")


def test_a_flat_folder_without_a_dictionary_has_letters(data: Path, tmp_path: Path) -> None:
    for n in range(20):
        noise(tmp_path / f"mine/{n:02}.wav", n)
        (tmp_path / f"mine/{n:02}.txt").write_text("Oh  no\n")
    found = speech.folder(tmp_path / "mine")
    assert [len(part) for part in found[1:4]] == [16, 2, 2]
    assert found.symbols == ("", " ", "h", "n", "o")
    assert "".join(found.symbols[s] for s in found.test.batch(np.array([1]))["targets"][0]) == "oh no"


def test_other_lists_of_transcripts_are_read(data: Path, tmp_path: Path) -> None:
    for part in ("train", "validation", "test"):
        noise(tmp_path / f"libri/{part}/61/70/61-70-0.wav", 0)
        (tmp_path / f"libri/{part}/61/70/61-70.trans.txt").write_text("61-70-0 HE HOPED\n")
        noise(tmp_path / f"kaldi/sound/{part}.wav", 1)
        (tmp_path / f"kaldi/{part}").mkdir()
        (tmp_path / f"kaldi/{part}/wav.scp").write_text(f"u1 ../sound/{part}.wav\n")
        (tmp_path / f"kaldi/{part}/text").write_text("u1 he hoped\n")
    for name in ("libri", "kaldi"):
        found = speech.folder(tmp_path / name)
        assert "".join(found.symbols[s] for s in found.test.batch(np.array([0]))["targets"][0]) == "he hoped"
    (tmp_path / "kaldi/test/wav.scp").write_text("u1 sph2pipe -f wav u1.sph |\n")
    with pytest.raises(Broken, match=r"wav\.scp gives a command for the sound of u1"):
        speech.folder(tmp_path / "kaldi")


def said(found: speech.Speech, part: speech.Utterances) -> list[str]:
    made = part.batch(np.arange(len(part)))
    rows = zip(made["targets"].tolist(), made["target_lengths"].tolist(), strict=True)
    return ["".join(found.symbols[s] for s in row[:n]) for row, n in rows]


@pytest.mark.parametrize("lists", ["", "text"])
def test_recordings_of_the_same_name_are_all_read(data: Path, tmp_path: Path, lists: str) -> None:
    root = tmp_path / "people"
    for n in range(12):
        for name, words in (("a", f"yes {n}"), ("b", f"no {n}")):
            noise(root / f"p{n:02}/{name}.WAV", n)
            if not lists:
                (root / f"p{n:02}/{name}.{'TXT' if n % 2 else 'txt'}").write_text(words)
        if lists:
            (root / f"p{n:02}/text").write_text(f"a\tyes {n}\nb  no {n}\n")
    found = speech.folder(root)
    assert [len(part) for part in found[1:4]] == [20, 2, 2]
    assert sorted(line for part in found[1:4] for line in said(found, part)) == sorted(
        f"{word} {n}" for n in range(12) for word in ("yes", "no")
    )
    assert said(found, found.test) == ["yes 9", "no 7"]
    if lists:
        for path in root.rglob("text"):
            path.unlink()
        (root / "text").write_text("a yes\nb no\n")
        with pytest.raises(Broken, match=r"text has one line for a, which names both .*p00/a\.WAV and .*p01/a\.WAV"):
            speech.folder(root)


def test_a_list_of_sounds_may_have_blank_lines(data: Path, tmp_path: Path) -> None:
    for part in ("train", "validation", "test"):
        noise(tmp_path / f"{part}/x y.wav", 0)
        (tmp_path / f"{part}/wav.scp").write_text("\nu1\tx y.wav \n\n")
        (tmp_path / f"{part}/text").write_text("u1 hm\n")
    assert speech.folder(tmp_path).test.names == ("u1",)
    (tmp_path / "test/wav.scp").write_text("u1\n")
    with pytest.raises(Broken, match=r"wav\.scp has no path for u1: accepted are lines of a name and a path"):
        speech.folder(tmp_path)


def test_folders_that_cannot_be_split_are_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="nowhere is not a folder here or in"):
        speech.folder("nowhere")
    (tmp_path / "a/train").mkdir(parents=True)
    with pytest.raises(Broken, match="train holds no sound files"):
        speech.folder(tmp_path / "a")
    noise(tmp_path / "a/train/x.wav", 0)
    (tmp_path / "a/train/x.txt").write_text("x")
    with pytest.raises(Broken, match="a holds only train: accepted are folders train, validation, test"):
        speech.folder(tmp_path / "a")
    noise(tmp_path / "b/x.wav", 0)
    (tmp_path / "b/x.txt").write_text("x")
    with pytest.raises(Broken, match="b holds 1 utterances: accepted are ten or more"):
        speech.folder(tmp_path / "b")


def put_flat(root: Path) -> None:
    for n in range(10):
        noise(root / f"{n}.wav", n)
        (root / f"{n}.txt").write_text("oh")


@pytest.mark.parametrize("name", ["3.txt", "text", "lexicon.txt", "wav.scp"])
def test_text_that_is_not_utf_8_is_named(data: Path, tmp_path: Path, name: str) -> None:
    put_flat(tmp_path)
    (tmp_path / name).write_bytes("3 caf\u00e9".encode("latin-1"))
    with pytest.raises(Broken, match=rf"/{name} holds 0xe9 at byte 5: accepted is text in utf-8"):
        speech.folder(tmp_path)


@pytest.mark.parametrize("number", [3, 8, 9])  # of training, validation and test
def test_a_sound_of_another_rate_is_named(data: Path, tmp_path: Path, number: int) -> None:
    put_flat(tmp_path)
    noise(tmp_path / f"{number}.wav", number, rate=16000)
    with pytest.raises(Broken, match=rf"/{number}\.wav has a sample rate of 16,000 Hz, but .*/0\.wav has 8,000 Hz"):
        speech.folder(tmp_path)


def test_cached_frames_do_not_hide_another_rate(data: Path, tmp_path: Path) -> None:
    put_flat(tmp_path)
    speech.folder(tmp_path)
    for n in range(8):  # the training part
        noise(tmp_path / f"{n}.wav", n, rate=16000)
    with pytest.raises(Broken, match=r"/8\.wav has a sample rate of 8,000 Hz, but .*/0\.wav has 16,000 Hz"):
        speech.folder(tmp_path)


def test_a_rate_too_low_for_frames_is_named(data: Path, tmp_path: Path) -> None:
    put_flat(tmp_path)
    noise(tmp_path / "0.wav", 0, seconds=9, rate=50)
    with pytest.raises(Broken, match=r"/0\.wav has a sample rate of 50 Hz: accepted is 100 Hz or more"):
        speech.folder(tmp_path)
