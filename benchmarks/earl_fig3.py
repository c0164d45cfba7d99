def earl_figures():
    return {}, []
