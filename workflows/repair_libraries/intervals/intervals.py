"""Closed intervals of numbers: pairs (low, high) with low <= high."""


def contains(interval, value):
    """Whether a value lies in an interval, its ends included."""
    low, high = interval
    return low <= value and value <= high


def length(interval):
    """How long an interval is."""
    low, high = interval
    return high - low


def overlaps(one, other):
    """Whether two intervals share a point."""
    return one[0] <= other[1] and other[0] <= one[1]


def intersection(one, other):
    """What two intervals share; None if that is nothing."""
    low = max(one[0], other[0])
    high = min(one[1], other[1])
    if low > high:
        return None
    return (low, high)


def shifted(interval, distance):
    """An interval moved up by a distance."""
    low, high = interval
    return (low + distance, high + distance)


def widened(interval, margin):
    """An interval with a margin on both sides; a negative margin that leaves nothing is an error."""
    low, high = interval[0] - margin, interval[1] + margin
    if low > high:
        raise ValueError("nothing is left")
    return (low, high)


def merged(intervals):
    """The fewest intervals that cover the same points, in order."""
    result = []
    for low, high in sorted(intervals):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def covered(intervals):
    """How much of the line a list of intervals covers."""
    return sum(length(each) for each in merged(intervals))


def gaps(intervals):
    """The open stretches between intervals, as pairs of their ends."""
    whole = merged(intervals)
    return [(before[1], after[0]) for before, after in zip(whole, whole[1:])]


def midpoint(interval):
    """The middle of an interval."""
    return (interval[0] + interval[1]) / 2
