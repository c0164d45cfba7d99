"""Small things with words."""

VOWELS = "aeiou"


def count_vowels(text):
    """How many vowels a text has."""
    return sum(1 for letter in text.lower() if letter in VOWELS)


def is_palindrome(text):
    """Whether the letters of a text read the same backwards."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return letters == letters[::-1]


def shortened(text, width):
    """A text of at most so many characters, with dots where something was cut off."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def wrapped(text, width):
    """The words of a text in lines of at most so many characters."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word if line else word
    if line:
        lines.append(line)
    return lines


def capitalised(text):
    """Each word with a capital, except short ones after the first."""
    result = []
    for index, word in enumerate(text.split()):
        if index == 0 or len(word) > 3:
            word = word[0].upper() + word[1:]
        result.append(word)
    return " ".join(result)


def caesar(text, shift):
    """Each small letter moved along the alphabet, from z to a."""
    moved = ""
    for letter in text:
        if "a" <= letter and letter <= "z":
            letter = chr((ord(letter) - ord("a") + shift) % 26 + ord("a"))
        moved += letter
    return moved


def most_common(text):
    """The word that comes most often; the first of several."""
    words = text.split()
    best = words[0]
    for word in words:
        if words.count(word) > words.count(best):
            best = word
    return best


def encoded(text):
    """Runs of a letter as the letter and its number: aaab becomes a3b1."""
    result, index = "", 0
    while index < len(text):
        end = index
        while end < len(text) and text[end] == text[index]:
            end += 1
        result += text[index] + str(end - index)
        index = end
    return result
