def plot_curve(m,p): pass
