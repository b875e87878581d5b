TEXTS = {f"progress.{k}": k for k in "start job world samples gradients drift averaging backward whatif steps".split()}
