from statistics import mean, pstdev
from math import comb
def mean_std(v): return mean(v), pstdev(v)
def pass_at_k(n,c,k): return 1.0-(comb(n-c,k)/comb(n,k) if n-c>=k else 0.0)
