"""Roman numerals from 1 to 3999."""

VALUES = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40, "X": 10, "IX": 9, "V": 5}
VALUES.update({"IV": 4, "I": 1})
LARGEST = 3999


def to_roman(number):
    """A number as a numeral."""
    if number < 1 or number > LARGEST:
        raise ValueError("out of range")
    text = ""
    for numeral, value in VALUES.items():
        while number >= value:
            text += numeral
            number -= value
    return text


def from_roman(text):
    """A numeral as a number; ValueError if it is not written as numerals are."""
    number, before = 0, 0
    for letter in reversed(text):
        value = VALUES.get(letter, 0)
        if value >= before:
            number += value
            before = value
        else:
            number -= value
    if number < 1 or number > LARGEST or to_roman(number) != text:
        raise ValueError("not a numeral")
    return number


def is_roman(text):
    """Whether a text is a numeral."""
    try:
        from_roman(text)
    except ValueError:
        return False
    return True


def add(one, other):
    """The sum of two numerals."""
    return to_roman(from_roman(one) + from_roman(other))


def subtract(one, other):
    """The difference of two numerals."""
    return to_roman(from_roman(one) - from_roman(other))


def century(year):
    """The numeral of a year's century: 1901 to 2000 is the XX."""
    return to_roman((year - 1) // 100 + 1)


def shortest(low, high):
    """The number from low to high, both included, with the shortest numeral; the smallest of several."""
    best = low
    for number in range(low, high + 1):
        if len(to_roman(number)) < len(to_roman(best)):
            best = number
    return best
