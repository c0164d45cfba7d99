"""Some tests of a contract, for an engine that differs from one that has passed them all."""


def only(*words):
    """A class decorator: of the inherited tests those stay whose names have one of the words."""

    def chosen(contract):
        for name in dir(contract):
            if name.startswith("test_") and not any(word in name for word in words):
                setattr(contract, name, None)
        return contract

    return chosen
