import pytest

import words


def test_count_vowels():
    assert words.count_vowels("Education") == 5
    assert words.count_vowels("rhythm") == 0


@pytest.mark.parametrize("text, expected", [("Never odd or even", True), ("ab", False), ("", True), ("aab", False)])
def test_is_palindrome(text, expected):
    assert words.is_palindrome(text) == expected


def test_shortened():
    assert words.shortened("abcdef", 6) == "abcdef"
    assert words.shortened("abcdefg", 6) == "abc..."


def test_wrapped():
    assert words.wrapped("aa bb cc", 5) == ["aa bb", "cc"]
    assert words.wrapped("aa bbbb cc", 3) == ["aa", "bbbb", "cc"]
    assert words.wrapped("", 3) == []


def test_capitalised():
    assert words.capitalised("the lord of the rings") == "The Lord of the Rings"
    assert words.capitalised("over and out") == "Over and out"


def test_caesar():
    assert words.caesar("xyz a", 3) == "abc d"
    assert words.caesar("abc", -1) == "zab"
    assert words.caesar("A{`", 2) == "A{`"


def test_most_common():
    assert words.most_common("a b b a c") == "a"
    assert words.most_common("a b b") == "b"


def test_encoded():
    assert words.encoded("aaab") == "a3b1"
    assert words.encoded("") == ""
