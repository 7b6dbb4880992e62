//! Devices that stand before another one.

/// Methods of [`Device`](crate::device::Device) that are those of the device in a field. Those that are not named are written
/// out beside, or stay what the trait gives.
///
/// ```ignore
/// impl Device for Counted {
///     hand_on!(device: name caps alloc spec write read poison instantiate launch drop_graph);
///
///     fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
///         self.count += 1;
///         self.device.issue(cmd)
///     }
/// }
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! hand_on {
    ($field:ident: $($method:ident)*) => { $($crate::hand_on!(@$method $field);)* };
    (@name $field:ident) => {
        fn name(&self) -> &str {
            self.$field.name()
        }
    };
    (@caps $field:ident) => {
        fn caps(&self) -> $crate::device::Caps {
            self.$field.caps()
        }
    };
    (@memory $field:ident) => {
        fn memory(
            &self,
        ) -> ::core::result::Result<::core::option::Option<$crate::device::Memory>, $crate::device::DeviceError> {
            self.$field.memory()
        }
    };
    (@alloc $field:ident) => {
        fn alloc(
            &mut self,
            spec: $crate::device::BufSpec,
        ) -> ::core::result::Result<$crate::device::Buf, $crate::device::DeviceError> {
            self.$field.alloc(spec)
        }
    };
    (@spec $field:ident) => {
        fn spec(
            &self,
            buf: $crate::device::Buf,
        ) -> ::core::result::Result<&$crate::device::BufSpec, $crate::device::DeviceError> {
            self.$field.spec(buf)
        }
    };
    (@issue $field:ident) => {
        fn issue(&mut self, cmd: &$crate::cmd::Cmd) -> ::core::result::Result<(), $crate::device::DeviceError> {
            self.$field.issue(cmd)
        }
    };
    (@write $field:ident) => {
        fn write(
            &mut self,
            buf: $crate::device::Buf,
            bytes: &[u8],
        ) -> ::core::result::Result<(), $crate::device::DeviceError> {
            self.$field.write(buf, bytes)
        }
    };
    (@read $field:ident) => {
        fn read(
            &mut self,
            buf: $crate::device::Buf,
            bytes: &mut [u8],
        ) -> ::core::result::Result<(), $crate::device::DeviceError> {
            self.$field.read(buf, bytes)
        }
    };
    (@poison $field:ident) => {
        fn poison(&mut self, buf: $crate::device::Buf) -> ::core::result::Result<(), $crate::device::DeviceError> {
            self.$field.poison(buf)
        }
    };
    (@instantiate $field:ident) => {
        fn instantiate(
            &mut self,
            cmds: ::std::vec::Vec<$crate::cmd::Cmd>,
        ) -> ::core::result::Result<$crate::device::GraphId, $crate::device::DeviceError> {
            self.$field.instantiate(cmds)
        }
    };
    (@launch $field:ident) => {
        fn launch(
            &mut self,
            graph: $crate::device::GraphId,
        ) -> ::core::result::Result<(), $crate::device::DeviceError> {
            self.$field.launch(graph)
        }
    };
    (@drop_graph $field:ident) => {
        fn drop_graph(
            &mut self,
            graph: $crate::device::GraphId,
        ) -> ::core::result::Result<(), $crate::device::DeviceError> {
            self.$field.drop_graph(graph)
        }
    };
    (@hold $field:ident) => {
        fn hold(&mut self) -> ::core::option::Option<$crate::device::Turn> {
            self.$field.hold()
        }
    };
    (@mark $field:ident) => {
        fn mark(
            &mut self,
        ) -> ::core::result::Result<::core::option::Option<$crate::device::Mark>, $crate::device::DeviceError> {
            self.$field.mark()
        }
    };
    (@times $field:ident) => {
        fn times(
            &mut self,
            marks: &[$crate::device::Mark],
        ) -> ::core::result::Result<::std::vec::Vec<::std::time::Instant>, $crate::device::DeviceError> {
            self.$field.times(marks)
        }
    };
}
