import unittest

import roman


class ToRoman(unittest.TestCase):
    def test_small(self):
        self.assertEqual([roman.to_roman(n) for n in (1, 2, 4, 5, 9, 14)], ["I", "II", "IV", "V", "IX", "XIV"])

    def test_large(self):
        self.assertEqual(roman.to_roman(1994), "MCMXCIV")
        self.assertEqual(roman.to_roman(3999), "MMMCMXCIX")

    def test_every_letter(self):
        self.assertEqual(roman.to_roman(2666), "MMDCLXVI")
        self.assertEqual(roman.to_roman(444), "CDXLIV")
        self.assertEqual(roman.to_roman(949), "CMXLIX")

    def test_out_of_range(self):
        for number in (0, 4000, -3):
            with self.assertRaises(ValueError):
                roman.to_roman(number)


class FromRoman(unittest.TestCase):
    def test_back(self):
        for number in (1, 3, 4, 8, 9, 40, 90, 400, 900, 1666, 1994, 3999):
            self.assertEqual(roman.from_roman(roman.to_roman(number)), number)

    def test_wrong(self):
        for text in ("", "IIII", "IC", "ABC", "VX", "MMMM"):
            with self.assertRaises(ValueError):
                roman.from_roman(text)

    def test_is_roman(self):
        self.assertTrue(roman.is_roman("XIV"))
        self.assertFalse(roman.is_roman("XIIV"))


class Sums(unittest.TestCase):
    def test_add(self):
        self.assertEqual(roman.add("XIV", "VI"), "XX")

    def test_subtract(self):
        self.assertEqual(roman.subtract("XX", "VI"), "XIV")

    def test_century(self):
        self.assertEqual(roman.century(1900), "XIX")
        self.assertEqual(roman.century(1901), "XX")
        self.assertEqual(roman.century(1), "I")

    def test_shortest(self):
        self.assertEqual(roman.shortest(7, 12), 10)
        self.assertEqual(roman.shortest(98, 100), 100)
        self.assertEqual(roman.shortest(4, 6), 5)
        self.assertEqual(roman.shortest(2, 4), 2)
