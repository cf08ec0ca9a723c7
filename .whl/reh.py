import os,time,sys
os.environ.pop("TRITON_INTERPRET",None)
sys.path.insert(0,"tests")
from flashbench.kernels import _compile
from attention import FEATURES, featured, problem
t=time.time()
for impl in ("flash","flash-v1","flash-v2-atomic"):
    for n in FEATURES:
        try:
            k=_compile.Task("",featured(n,dtype="bf16"),(9,0),232448,implementation=impl)
            r=_compile.rehearse(k,"bwd")
            print(impl,n,[x.name for x in r], round(time.time()-t,3))
        except Exception as e: print(impl,n,type(e),str(e)[:200])
        t=time.time()
print([x.name for x in _compile.rehearse(_compile.Task("",problem(dtype="fp8"),(9,0),232448,implementation="flash-fp8"),"fwd")])
print([x.name for x in _compile.rehearse(_compile.Task("",problem(dtype="fp8",fp8_scale="head",hadamard=True,layout="bshd"),(9,0),232448,implementation="flash-fp8"),"fwd")])
