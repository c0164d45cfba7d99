"""Figures about lists of numbers."""


def total(numbers):
    """The sum."""
    result = 0
    for number in numbers:
        result = result + number
    return result


def mean(numbers):
    """The mean; ValueError without numbers."""
    if len(numbers) == 0:
        raise ValueError("no numbers")
    return total(numbers) / len(numbers)


def median(numbers):
    """The middle number, or the mean of the two in the middle."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def spread(numbers):
    """The largest number less the smallest."""
    return max(numbers) - min(numbers)


def variance(numbers):
    """The mean square of the distance from the mean."""
    middle = mean(numbers)
    return sum((number - middle) ** 2 for number in numbers) / len(numbers)


def running(numbers):
    """Sums of the first, the first two, and so on."""
    result, so_far = [], 0
    for number in numbers:
        so_far += number
        result.append(so_far)
    return result


def differences(numbers):
    """Each number less the one before it."""
    return [after - before for before, after in zip(numbers, numbers[1:])]


def moving_mean(numbers, width):
    """The means of every so many neighbours."""
    return [mean(numbers[start : start + width]) for start in range(len(numbers) - width + 1)]


def clipped(numbers, low, high):
    """Numbers below low and above high replaced by these."""
    return [min(max(number, low), high) for number in numbers]


def share_above(numbers, bound):
    """The share of numbers above a bound."""
    return sum(1 for number in numbers if number > bound) / len(numbers)


def rising(numbers):
    """Whether each number is above the one before it."""
    return all(step > 0 for step in differences(numbers))


def longest_run(numbers):
    """The length of the longest stretch of equal numbers."""
    best, current = 0, 0
    for index, number in enumerate(numbers):
        if index > 0 and number == numbers[index - 1]:
            current += 1
        else:
            current = 1
        best = max(best, current)
    return best
