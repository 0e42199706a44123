"""What counts as the same prompt, nearly the same, or one conversation."""

from typing import Any

from draftsmith.data.duplicates import LikenessIndex, conversation_keys, sketch_of, text_key

LONG = "Explain to a child of ten years how a steam engine turns the heat of burning coal into the motion of a wheel"


def prompt(text: str, **more: Any) -> dict[str, Any]:
    return {"id": text, "source": "s", "messages": [{"role": "user", "content": text}]} | more


def are_alike(one: dict[str, Any], other: dict[str, Any], threshold: float = 0.8) -> bool:
    index = LikenessIndex(threshold)
    index.add("one", sketch_of(one))
    return bool(index.find(sketch_of(other)))


def test_white_space_and_unicode_form_make_no_difference_to_equality_but_every_sign_does() -> None:
    assert text_key(prompt("a  cafe\u0301\n")) == text_key(prompt("a caf\u00e9"))
    assert text_key(prompt("3 + 4")) != text_key(prompt("3 - 4"))
    assert text_key(prompt("x²")) != text_key(prompt("x2"))


def test_followups_tools_and_the_system_message_belong_to_the_text() -> None:
    plain = prompt("a")
    system = plain | {"messages": [{"role": "system", "content": "be brief"}, *plain["messages"]]}
    assert len({text_key(p) for p in (plain, plain | {"followups": ["b"]}, plain | {"tools": [{}]}, system)}) == 4


def test_a_changed_word_in_a_long_prompt_is_a_near_duplicate_and_another_prompt_is_not() -> None:
    assert are_alike(prompt(LONG), prompt(LONG + ", please!"))
    assert are_alike(prompt(LONG), prompt(LONG.upper()))
    assert not are_alike(prompt(LONG), prompt("Write a poem about the sea in which no line rhymes with another one"))


def test_short_sums_that_differ_in_a_sign_are_not_near_duplicates() -> None:
    assert not are_alike(prompt("What is 3 + 4?"), prompt("What is 3 - 4?"))


def test_scripts_without_spaces_are_compared_by_character() -> None:
    text = "蒸気機関が石炭の熱をどのように車輪の動きに変えるかを十歳の子供に説明してください"
    assert are_alike(prompt(text), prompt(text + "。"))
    assert not are_alike(prompt(text), prompt("海についての詩を書いてください。韻を踏む必要はありません"))


def test_a_long_system_message_does_not_make_all_prompts_alike() -> None:
    system = {"role": "system", "content": LONG * 3}
    one, other = prompt("What is rust?"), prompt("Name a river of France.")
    for each in (one, other):
        each["messages"].insert(0, system)
    assert not are_alike(one, other)


def test_the_index_decides_by_similarity_and_not_by_bucket_alone() -> None:
    """MinHashLSH alone returns bands that collide by chance, far below the threshold."""
    words = [f"w{n}" for n in range(400)]
    base = prompt(" ".join(words))
    half = prompt(" ".join(words[:270] + [f"x{n}" for n in range(130)]))  # similarity about a half
    index = LikenessIndex(0.8)
    index.add("base", sketch_of(base))
    assert not index.find(sketch_of(half))


def test_prompts_of_one_conversation_share_a_key() -> None:
    short, long = prompt("hello there"), prompt("hello there")
    long["messages"] = [*long["messages"], {"role": "assistant", "content": "hi"}, {"role": "user", "content": "why"}]
    assert set(conversation_keys(short)) & set(conversation_keys(long))
    tagged, other = prompt("x", conversation_id="7"), prompt("y", conversation_id="7")
    assert set(conversation_keys(tagged)) & set(conversation_keys(other))
    assert not set(conversation_keys(short)) & set(conversation_keys(prompt("bye")))
