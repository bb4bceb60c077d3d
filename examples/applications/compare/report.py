def write_report(plan, store, failed):
    from compare.run import result_of
    for m in plan.candidates:
        print(result_of(plan, store, m)["figures"]["kl"]["estimate"])
