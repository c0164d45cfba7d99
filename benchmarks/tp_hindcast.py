def hindcast_figures():
    return {}, []
